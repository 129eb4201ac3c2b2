"""Compiles configs (dicts of macros) by NVRTC: build.py MODULE [part of a name] -> cubin/NAME.cubin; prints registers, spills, warnings."""
import ctypes, glob, importlib, multiprocessing, os, re, sys, time
HERE=os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0,HERE)
def wgm(fn,N,rs,ta,tb):
    n=N//2; regs=", ".join(f"%{i}" for i in range(n)); r=""
    for z in (0,1):
        outs=", ".join(f'"{"=" if z else "+"}f"(d[{i}])' for i in range(n)); sd="0" if z else "1"
        A,AD,AI=(("u32 a0,u32 a1,u32 a2,u32 a3",f"{{%{n},%{n+1},%{n+2},%{n+3}}}",'"r"(a0),"r"(a1),"r"(a2),"r"(a3)') if rs else ("u64 a",f"%{n}",'"l"(a)'))
        bi=n+(4 if rs else 1); tail=f"{tb}" if rs else f"{ta}, {tb}"
        r+=f'''DI void {fn}{"_z" if z else ""}(float (&d)[{n}],{A},u64 b{"" if z else ",int"}){{
 asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {sd}, 0;\\nwgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 {{{regs}}}, {AD}, %{bi}, p, 1, 1, {tail};\\n}}"
 : {outs} : {AI},"l"(b)); }}
'''
    return r
def wgmmas(c):
    BM,D=c["BM"],c["D"]; dqn=64 if c.get("DQWG") else BM*D//128
    return wgm("wg_hr",BM//2,True,0,0)+wgm("wg_h",BM//2,False,0,0)+wgm("wg_s",BM,False,0,0)+wgm("wg_sr",BM,True,0,0)+wgm("wg_kv",D,True,0,1)+(wgm("wg_dq",dqn,False,1,0) if c["SWAP"] else wgm("wg_dq",dqn,False,0,1))
def load_nvrtc():
    for p in ["libnvrtc.so.13"]+glob.glob(sys.prefix+"/lib/python3*/site-packages/nvidia/cu13/lib/libnvrtc.so.13")+glob.glob("/usr/local/lib/python3*/*/nvidia/cu13/lib/libnvrtc.so.13")+["/usr/local/cuda/lib64/libnvrtc.so.13"]:
        try: return ctypes.CDLL(p)
        except OSError: pass
    raise SystemExit("no nvrtc")
DEF=dict(STQ=2,STD=2,DSB=2,PIPE=1,LAG=1,SWAP=0,CAUSAL=0,SRC="two.cu")
HOST=("SRC","GMB","W","DQM","INPL","MAXS","L2P","NOCHK","CH","ST")     # no macros
LAUNCH=("GMB","MAXS","L2P","NOCHK","CH","ST")       # of the same code
def code(cfg): return {k:v for k,v in cfg.items() if k not in LAUNCH}
def full(c): return {**DEF,**c}
def build(cfg):
    cfg=full(cfg); src=open(os.path.join(HERE,cfg["SRC"])).read().replace("//WGMMA//", wgmmas(cfg))
    skip=set(HOST)
    if cfg["SRC"]=="bwd.cu": skip-={"DQM","INPL"}; cfg={"NC":2,"DQM":2,**cfg}
    if cfg.get("W"): skip|={"D","BM","STQ","STD","DSB","PIPE","LAG","SWAP"}
    opts=["-arch=sm_90a","--ptxas-options=-v","-default-device","--std=c++17"]+[f"-D{k}={v}" for k,v in cfg.items() if k not in skip]
    L=load_nvrtc(); prog=ctypes.c_void_p(); assert L.nvrtcCreateProgram(ctypes.byref(prog), src.encode(), b"bwd.cu", 0, None, None)==0
    o=(ctypes.c_char_p*len(opts))(*[x.encode() for x in opts]); r=L.nvrtcCompileProgram(prog,len(opts),o)
    n=ctypes.c_size_t(); L.nvrtcGetProgramLogSize(prog,ctypes.byref(n)); b=ctypes.create_string_buffer(n.value); L.nvrtcGetProgramLog(prog,b); log=b.value.decode()
    if r: raise RuntimeError(log)
    L.nvrtcGetCUBINSize(prog,ctypes.byref(n)); cub=ctypes.create_string_buffer(n.value); L.nvrtcGetCUBIN(prog,cub); return cub.raw[:n.value], log
def name(cfg): return "_".join(f"{k}{v}" for k,v in cfg.items() if k!="SRC").replace("/","")
def smem(cfg):
    c=full(cfg)
    if c.get("W"): return 131072+16384+32768+2*16384+16384+3*512+8*16
    D,BM=c["D"],c["BM"]; b=(c["STQ"]+c["STD"])*(BM*D*2+BM*4)+256*D*2+c["DSB"]*BM*256+BM*D*4+8*(2+2*c["STQ"]+2*c["STD"]+2*c["DSB"])
    if c.get("VK")==D//16 and BM*D*4==256*D: b-=256*D
    return b+32
def one(c):
    t=time.time()
    try: cub,log=build(c)
    except RuntimeError as e: return name(c)+" FAILED "+str([l for l in str(e).splitlines() if "error" in l][:4])
    open(os.path.join(HERE,"cubin",name(c)+".cubin"),"wb").write(cub)
    m=re.search(r"Compiling entry function 'bwd'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",log,re.S)
    warn=sorted({re.search(r"C7\d+",l).group() for l in log.splitlines() if "(C7" in l}); s=smem(c)
    return f"{name(c)}: {time.time()-t:.1f}s spill {m and m.groups()} smem {s} {'TOO BIG' if s>232448 else ''} {warn}"
if __name__=="__main__":
    cfgs=importlib.import_module(sys.argv[1]).CFGS; os.makedirs(os.path.join(HERE,"cubin"),exist_ok=True)
    cfgs=list({name(code(c)):code(c) for c in cfgs if len(sys.argv)<3 or sys.argv[2] in name(c)}.values())
    with multiprocessing.Pool(int(os.environ.get("JOBS","16"))) as p:
        for l in p.imap(one,cfgs): print(l,flush=True)
