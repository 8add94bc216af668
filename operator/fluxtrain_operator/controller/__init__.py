"""The controller: informers, cache, work queue, reconcile; the only code that sends requests."""
