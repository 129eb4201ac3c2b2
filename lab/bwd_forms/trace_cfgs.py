# Where a block spends its time: trace.cu is two.cu of the second screening with the clock of one thread at 38 places
F=dict(D=64,BM=128,VK=4); A=dict(D=128,BM=64)
G1=dict(F,P16=1,PEEL=1,SRC="trace.cu"); A1=dict(A,P16=1,PEEL=1,SRC="trace.cu")
CFGS=[dict(G1,CAUSAL=1,GMB=0),dict(G1),dict(A1,CAUSAL=1,GMB=4),dict(G1,CAUSAL=1,GMB=0,NODQ=1),dict(G1,CAUSAL=1,GMB=32)]
