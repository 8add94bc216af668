"""HTTP servers of trainers and of the rendezvous service, bounded; without torch."""
