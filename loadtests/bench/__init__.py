"""What the gateway costs: CPU per request, per streamed event and per decision, and memory per open stream."""
