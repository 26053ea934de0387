"""`python -m attnbalance.cli`, as `accelerate launch -m attnbalance.cli` starts it."""

from attnbalance.cli import main

main()
