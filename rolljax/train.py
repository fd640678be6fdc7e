"""`python -m rolljax.train` runs `rolljax.commands.train`. Import that module; `rolljax.train` is the function."""

if __name__ == "__main__":
    import sys

    from rolljax.commands.train import main

    sys.exit(main())
if __name__ != "__mp_main__":  # a worker process of `multiprocessing` reads the main module again
    raise ImportError("rolljax.train is a function; the command is rolljax.commands.train")
