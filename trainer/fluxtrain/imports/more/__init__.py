"""Tables of trainers whose options are few."""
