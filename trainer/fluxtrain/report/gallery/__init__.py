"""gallery.html: samples over steps, the loss curve, settings and speed of a run, on one page."""
