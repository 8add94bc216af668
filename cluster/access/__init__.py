"""Who may do what: certificates, and kubeconfigs with them."""
