"""`python -m rolljax.service` runs `rolljax.commands.service`."""

if __name__ == "__main__":
    import sys

    from rolljax.commands.service import main

    sys.exit(main())
