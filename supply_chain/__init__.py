"""The packages of the images: pinned with hashes, listed as CycloneDX, compared with known advisories."""
