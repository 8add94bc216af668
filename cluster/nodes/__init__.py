"""Nodes: kubelet and containerd, images, volumes, and fake nodes and GPUs."""
