"""Files generated from the contract's models: the CRD and the reference pages."""
