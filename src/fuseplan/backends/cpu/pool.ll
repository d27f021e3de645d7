; The launches, and the threads of our own: LLVM IR, but for the names behind a dollar, which runtime.py fills in.
; Among them are the addresses of the words of the state of the pool, such as `%lock.at`.

$declarations

define internal void @take.part(ptr %pool, i64 %thread) {
  $words
  %threads = load i64, ptr %threads.at
  %needed = icmp slt i64 %thread, %threads
  br i1 %needed, label %work, label %leave
work:
  %function = load ptr, ptr %function.at
  %args = load ptr, ptr %args.at
  call void %function(ptr %args, i64 %thread, i64 %threads)
  br label %leave
leave:
  ret void
}

; A worker takes part in the job that is open, if it is the job it was woken for.
define void @enter(ptr %pool, i64 %generation) {
  $words
  %count = atomicrmw add ptr %entered.at, i64 1 seq_cst
  %job = load atomic i64, ptr %open.at seq_cst, align 8
  %same = icmp eq i64 %job, %generation
  br i1 %same, label %join, label %leave
join:
  %thread = atomicrmw add ptr %next.at, i64 1 monotonic
  call void @take.part(ptr %pool, i64 %thread)
  br label %leave
leave:
  %left = atomicrmw sub ptr %entered.at, i64 1 seq_cst
  ret void
}

; Waits for a job, enters it, waits for the next; returns when the generation turns negative.
define void @worker(ptr %pool, i64 %spins) {
entry:
  $words
  br label %wait
wait:
  %last = phi i64 [ 0, %entry ], [ %now, %begin ]
  br label %spin
spin:
  %tries = phi i64 [ 0, %wait ], [ %more, %again ], [ 0, %sleep ]
  %now = load atomic i64, ptr %pool acquire, align 8
  %new = icmp ne i64 %now, %last
  br i1 %new, label %check, label %again
again:
  $relax
  %more = add i64 %tries, 1
  %on = icmp slt i64 %more, %spins
  br i1 %on, label %spin, label %sleep
sleep:
  %in = atomicrmw add ptr %sleepers.at, i64 1 seq_cst
  %expected = trunc i64 %last to i32
  $sleep
  %out = atomicrmw sub ptr %sleepers.at, i64 1 seq_cst
  br label %spin
check:
  %stop = icmp slt i64 %now, 0
  br i1 %stop, label %quit, label %begin
begin:
  call void @enter(ptr %pool, i64 %now)
  br label %wait
quit:
  ret void
}

define void @wake(ptr %pool, i64 %threads) {
  $words
  %asleep = load atomic i64, ptr %sleepers.at seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %call, label %done
call:
  $wake
  br label %done
done:
  ret void
}

; A thread of another library's team, which numbers its threads.
define internal void @member(ptr %pool) {
  $words
  %number = load ptr, ptr %number.at
  %narrow = call i32 %number()
  %thread = zext i32 %narrow to i64
  call void @take.part(ptr %pool, i64 %thread)
  ret void
}

; Opens a job, takes part as thread 0, closes it and waits for those that entered. Where the state names the
; team of another library, and that has as many threads, the job is the team's.
define void @launch(ptr %pool, ptr %function, ptr %args, i64 %threads) {
  $words
  call void @llvm.memset.p0.i64(ptr align 8 %args, i8 0, i64 128, i1 false)
  %alone = icmp slt i64 %threads, 2
  br i1 %alone, label %solo, label %try
try:
  %got = cmpxchg ptr %lock.at, i64 0, i64 1 acquire monotonic
  %mine = extractvalue { i64, i1 } %got, 1
  br i1 %mine, label %place, label %solo
solo:
  call void %function(ptr %args, i64 0, i64 1)
  ret void
place:
  store ptr %function, ptr %function.at
  store ptr %args, ptr %args.at
  store i64 %threads, ptr %threads.at
  %team = load ptr, ptr %team.at
  %apart = icmp eq ptr %team, null
  br i1 %apart, label %open.job, label %ask
ask:
  %most = load ptr, ptr %most.at
  %members = call i32 %most()
  %wanted = trunc i64 %threads to i32
  %alike = icmp eq i32 %members, %wanted
  br i1 %alike, label %lead, label %open.job
lead:
  call void %team(ptr @member, ptr %pool, i32 %wanted, i32 0)
  br label %close
open.job:
  store atomic i64 1, ptr %next.at monotonic, align 8
  %before = load atomic i64, ptr %pool monotonic, align 8
  %job = add i64 %before, 1
  store atomic i64 %job, ptr %open.at seq_cst, align 8
  store atomic i64 %job, ptr %pool seq_cst, align 8
  call void @wake(ptr %pool, i64 %threads)
  call void %function(ptr %args, i64 0, i64 %threads)
  store atomic i64 0, ptr %open.at seq_cst, align 8
  br label %drain
drain:
  %pauses = phi i64 [ 0, %open.job ], [ 0, %yield ], [ %more, %wait ]
  %inside = load atomic i64, ptr %entered.at seq_cst, align 8
  %empty = icmp eq i64 %inside, 0
  br i1 %empty, label %close, label %wait
wait:
  $relax
  %more = add i64 %pauses, 1
  %on = icmp slt i64 %more, $patience
  br i1 %on, label %drain, label %yield
yield:
  $give_way
  br label %drain
close:
  store atomic i64 0, ptr %lock.at release, align 8
  ret void
}
