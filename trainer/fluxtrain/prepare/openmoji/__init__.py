"""The OpenMoji demo data set."""
