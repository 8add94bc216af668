"""Downloads: resumable, verified, bounded."""
