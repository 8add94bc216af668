"""The preflight: before anything is loaded, each rank's device and its links to other nodes are compared."""
