"""What a run tells: metrics, records, pictures of the loss, words on the terminal."""
