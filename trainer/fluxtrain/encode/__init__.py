"""The frozen encoders: captions to text tokens and pooled vectors, images to latents and back."""
