"""Fine-tuning: data, loss, trainer, fuse. Adapter layers and folders are the core's (`openelm_mlx.adapters`)."""
