"""`python -m llmfoundry` is the console command `llmfoundry`."""

from llmfoundry.console import main

if __name__ == "__main__":
    main()
