"""`python -m agentrt.cli`: the command line without the console script."""

from agentrt.cli import main

main()
