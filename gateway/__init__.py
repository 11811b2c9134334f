"""The shell: everything that touches sockets, clocks, Prometheus or configuration files."""
