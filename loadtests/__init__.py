"""The evidence: workloads, engine model, simulator, live driver, comparisons and reports."""
