"""Fine-tuning: data, loss, trainer, fuse. Adapter layers and adapter folders are the core's (`openelm_mlx.adapters`)."""
