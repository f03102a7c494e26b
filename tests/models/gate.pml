/* Admission: requests of one gate of bytes, first in, first out.
 *
 * Each step of a request is one change that the gate makes under its lock, or one that
 * the event loop makes between two steps of a task. The lock makes changes atomic, so
 * it is not modelled. A request may be cancelled, time out or lose its lease ("crash")
 * at each of its steps, while another task resizes and closes the gate.
 *
 * With -DTRACE a simulation prints one line per change: the change, and what can be
 * seen of the gate after it. These lines are replayed on the real gate.
 *
 * Faults: -DFAULT=n leaves out one line, marked (n) below.
 */
#ifndef N
#define N 3     /* requests */
#endif
#ifndef RESIZES
#define RESIZES 2
#endif
#define LONGEST 2 /* max_waiting */
#define LARGEST 4 /* no cost is larger; the last capacity */
#ifndef FAULT
#define FAULT 0
#endif

/* A request: NEW, then WAITING in the queue, DECIDED (granted, refused or passed over,
 * while its task has not run since), HELD or OVER. */
#define NEW 0
#define WAITING 1
#define GRANTED 2
#define REFUSED 3
#define PASSED_OVER 4
#define HELD 5
#define OVER 6

byte state[N];
byte cost[N];
bool woken[N];      /* its waiter is set: by a grant, a refusal or its deadline */
bool cut[N];        /* its task is cancelled, and has not run since */
bool deaf[N];       /* ... before its waiter was set, so that it cannot be woken */

chan queue = [N] of { byte };
byte capacity = 2, in_use;
byte ahead;         /* requests that waited and whose tasks have not run since */
bool closed;

mtype = { Arrive, Cancel, Expire, Resume, Settle, Release, Crash, Resize, Close };

#ifdef TRACE
/* Counters are history: they would multiply the states to visit. */
byte received, admitted, released, refused, withdrawn, timed_out, lost;
#define COUNT(counter) counter++
#define SHOW(what, i, x) \
  printf("@ %e %d %d : %d %d %d %d %d %d %d\n", what, i, x, in_use, len(queue), \
    admitted, released, refused, withdrawn - timed_out, lost)
#else
#define COUNT(counter) skip
#define SHOW(what, i, x) skip
#endif

#define FITS(i) (in_use + cost[i] <= capacity)
#define TOO_LARGE(i) (0 < capacity && capacity < cost[i])
#define HOLDS(i) (state[i] == GRANTED || state[i] == HELD)
#define DECIDED(i) (woken[i] || cut[i])

/* The laws, after each change. */
inline check() {
  d_step {
    sum = 0; k = 0;
    do
    :: k < N ->
      if
      :: HOLDS(k) -> sum = sum + cost[k]
      :: else
      fi;
      /* What was decided for a request reaches its task. */
      assert(!(state[k] == GRANTED || state[k] == REFUSED) || DECIDED(k));
      k++
    :: else -> break
    od;
    /* What is in use is what the live leases cost. */
    assert(sum == in_use);
    /* No capacity is free beside a first request that fits. */
    if
    :: queue?[head] -> queue?<head>; assert(!FITS(head)); assert(!closed)
    :: else
    fi;
#ifdef TRACE
    /* Each request is accounted for once. */
    assert(received == admitted + refused + (withdrawn - timed_out) + len(queue));
    assert(released <= admitted && lost <= released);
#endif
    k = 0; head = 0; sum = 0
  }
}

inline charge(i) {
  in_use = in_use + cost[i];
  /* A grant never takes the gate over its capacity. */
  assert(in_use <= capacity);
  COUNT(admitted)
}

/* Grant all requests that are next and fit. */
inline grant() {
  do
  :: queue?[head] ->
    queue?<head>;
    if
    :: !FITS(head) -> break
    :: else ->
      queue?head;
      if
      :: deaf[head] -> state[head] = PASSED_OVER; COUNT(withdrawn)
      :: else -> state[head] = GRANTED; woken[head] = true; charge(head)
      fi
    fi
  :: else -> break
  od
}

inline release(i) {
  in_use = in_use - cost[i];
  COUNT(released);
  grant()               /* the next one gets what this one held */
}

inline withdraw(i) {
  queue??eval(i);
  COUNT(withdrawn);
#if FAULT != 1
  grant()               /* (1) it may have blocked smaller ones */
#endif
}

inline refuse(i) { COUNT(refused); state[i] = OVER }

inline arrive(i) {
  COUNT(received);
  if
  :: closed -> refuse(i)
#if FAULT == 2
  :: !closed && FITS(i) -> assert(!ahead); state[i] = HELD; charge(i) /* (2) though others wait */
  :: !closed && !FITS(i) ->
#else
  :: !closed && !ahead && FITS(i) -> assert(empty(queue)); state[i] = HELD; charge(i)
  :: !closed && (ahead || !FITS(i)) ->
#endif
    if
    :: TOO_LARGE(i) -> refuse(i)
    :: else ->
      if
      :: (len(queue) || !FITS(i)) && len(queue) >= LONGEST -> refuse(i)
      :: else ->
        queue!i; state[i] = WAITING; ahead++;
        grant()
      fi
    fi
  fi
}

/* The task of a request that waited runs again. */
inline resume(i) {
  if
  :: cut[i] ->
    if
#if FAULT == 3
    :: state[i] == GRANTED -> state[i] = OVER; in_use = in_use - cost[i]; COUNT(released)
#else
    :: state[i] == GRANTED -> state[i] = OVER; release(i) /* (3) pass it on */
#endif
    :: state[i] == WAITING -> state[i] = OVER; withdraw(i)
    :: else -> state[i] = OVER
    fi
  :: else ->
    if
    :: state[i] == GRANTED -> state[i] = HELD
    :: state[i] == WAITING -> /* its deadline */
      state[i] = OVER; COUNT(refused); COUNT(timed_out); withdraw(i)
    :: else -> state[i] = OVER
    fi
  fi;
  ahead--
}

/* Refuse the waiting requests for which the condition holds; k counts, j is free. */
inline refuse_waiting(condition) {
  j = 0;
  do
  :: j < N ->
    if
    :: state[j] == WAITING && (condition) ->
      queue??eval(j); state[j] = REFUSED; COUNT(refused)
    :: else
    fi;
    j++
  :: else -> break
  od;
  grant();
#if FAULT != 4
  j = 0;
  do
  :: j < N ->
    if
    :: state[j] == REFUSED && !deaf[j] -> woken[j] = true /* (4) wake it */
    :: else
    fi;
    j++
  :: else -> break
  od;
#endif
  j = 0
}

proctype request(byte me) {
  byte k, head, sum; bool settled;
  atomic { arrive(me); SHOW(Arrive, me, cost[me]); check() }
  do
  :: atomic { state[me] == WAITING || state[me] == GRANTED || state[me] == REFUSED ||
      state[me] == PASSED_OVER ->
    if
    :: !cut[me] -> /* a cancellation */
      cut[me] = true;
      deaf[me] = !woken[me];
      SHOW(Cancel, me, 0)
    :: !woken[me] && !cut[me] -> /* its deadline */
      woken[me] = true;
      SHOW(Expire, me, 0)
    :: DECIDED(me) -> resume(me); SHOW(Resume, me, 0); check()
    fi }
  :: atomic { state[me] == HELD ->
    if
    :: !settled -> /* to another size */
      settled = true;
      in_use = in_use - cost[me];
      if
      :: cost[me] = 1
      :: cost[me] = 3
      fi;
      in_use = in_use + cost[me];
      grant();
      SHOW(Settle, me, cost[me]); check()
    :: true -> state[me] = OVER; release(me); SHOW(Release, me, 0); check()
    :: true -> /* its holder dies, and the collector finds the lease */
      state[me] = OVER; COUNT(lost); release(me); SHOW(Crash, me, 0); check()
    fi }
  :: atomic { state[me] == OVER ->
    woken[me] = false; cut[me] = false; deaf[me] = false; cost[me] = 0; break }
  od
}

proctype owner() {
  byte k, j, head, sum, resizes;
  do
  :: atomic { resizes < RESIZES ->
    resizes++;
    if
    :: capacity = 0
    :: capacity = 1
    :: capacity = 3
    fi;
    refuse_waiting(TOO_LARGE(j));
    SHOW(Resize, 0, capacity); check() }
  :: atomic { true ->
    closed = true; refuse_waiting(true); SHOW(Close, 0, 0); check(); break }
  :: atomic { true ->
    capacity = LARGEST; refuse_waiting(TOO_LARGE(j));
    SHOW(Resize, 0, capacity); check(); break }
  od
}

init {
  byte i, c;
  atomic {
    do
    :: i < N ->
      if
      :: c = 1
      :: c = 2
      fi;
      cost[i] = c;
      run request(i);
      i++
    :: else -> break
    od;
    run owner()
  }
  /* Once all requests are over, nothing is left. */
  _nr_pr == 1 ->
  assert(in_use == 0 && empty(queue) && ahead == 0)
}

/* A request that waits does not wait for ever, and a cancelled one ends. */
ltl served { [] (state[0] == WAITING -> <> (state[0] != WAITING)) }
ltl ended { <> (state[0] == OVER) }
