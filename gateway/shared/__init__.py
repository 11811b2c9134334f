"""What several gateways share over Redis, each part of which fails open to what one gateway knows alone."""
