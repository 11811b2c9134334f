"""Where the list of replicas comes from: a watched file, DNS, Kubernetes; and what a change of it does to the fleet."""
