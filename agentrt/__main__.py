"""`python -m agentrt`: the command line without the console script."""

from agentrt.cli import main

main()
