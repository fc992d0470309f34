"""dflash: a streaming trainer for DFlash speculative-decoding drafters. Start reading at `dflash/train.py`."""
