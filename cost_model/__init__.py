"""What a plan costs: seconds and bytes, from a catalogue of hardware and closed forms.

``hardware`` says what devices and links can do, ``compute`` prices ops, ``collectives`` communication, ``memory`` the
bytes of parameters, gradients and optimizer state.  Seconds, bytes, FLOPs and elements are the only units.
"""
