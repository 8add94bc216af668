"""Files of servers, buckets and the Hub, fetched into a bounded folder of the node."""
