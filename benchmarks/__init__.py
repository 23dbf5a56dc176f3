"""The benchmarks room: `openelm bench`, and the scripts that hold this project's claims against mlx-lm."""
