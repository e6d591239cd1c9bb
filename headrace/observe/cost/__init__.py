"""Cost of requests: each step's seconds divided among the requests that used them, and priced."""
