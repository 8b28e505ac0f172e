"""What each client is tried with; every check is a function without arguments.

A check that returns has worked; it returns a sentence where the client itself limits what can be had, and the check
has seen it do so. Any exception is a failure. Modules here run with the clients' interpreter: of the project they
import this package alone.
"""
