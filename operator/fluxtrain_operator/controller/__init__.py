"""The controller: watches, cache, work queue, reconcile, and the only code that sends requests."""
