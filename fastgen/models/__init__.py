"""How one decode step of a model runs: the toolkit's own modules, with attention and linear layers routed to ops."""
