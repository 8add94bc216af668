"""Files of servers, buckets and the Hugging Face Hub, fetched into a bounded folder of the node."""
