"""Learns what each token needs: the carved start, masks and routers, the plan made of them, its repair."""
