"""Images and captions at one size, whatever holds them."""
