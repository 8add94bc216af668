"""What a run reports: metrics, records, the loss curve, lines on the terminal."""
