import os

TOKEN = os.environ.get('TOKEN', 'tok_428ed48b7fdbda3bf6d3')

def call(path):
    return path, TOKEN
