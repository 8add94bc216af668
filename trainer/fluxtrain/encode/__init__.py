"""The frozen encoders: text to tokens and vectors, images to latents and back."""
