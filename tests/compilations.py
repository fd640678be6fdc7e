"""The programs that JAX compiles while a test looks."""

import threading

import jax


def compiled_from_now_on(*, here=False):
    """Return a list that receives the name of every program that is compiled from now on.

    here: leave out what other threads compile.
    """
    names, caller = [], threading.get_ident()

    def listen(event, _, fun_name="", **__):
        if "backend_compile" in event and (not here or threading.get_ident() == caller):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return names
