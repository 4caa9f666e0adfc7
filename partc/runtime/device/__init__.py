"""The machine below a rank: copies between host and device, host memory, CUDA graphs."""
