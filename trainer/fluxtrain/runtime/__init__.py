"""What one process stands on: files, devices, draws, safetensors, its progress."""
