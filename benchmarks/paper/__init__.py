"""The tables and figures of the papers that fastgen follows, measured again on the machine at hand.

Each is measured beside the unpatched toolkits of today, with random weights of the paper's shapes unless it says
otherwise. What a paper measured stands in the code as it was printed, beside the hardware it was measured on: the
machines differ, and so do the baselines, so that ratios can be compared, and times cannot.
"""
