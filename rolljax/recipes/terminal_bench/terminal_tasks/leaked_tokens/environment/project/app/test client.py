from app.client import call

def test_call():
    assert call('/')[1].startswith('tok_')
    fake = 'tok_8e4ee5965b8be88c150a'
