/* The shared gate: elections, the fence between epochs, and grants, over workers that
 * die, stop for good, or run as slowly as they like between any two steps.
 *
 * Each worker makes some requests of one slot, one after another. It seeks a leader,
 * follows it or leads itself; who leads grants to all. A step is what a worker does
 * under its lock, or one store, one look or one link that others may come before or
 * after. The comment of a step names the method of `lifecycle.shared` that makes it.
 *
 * Nobody does the same twice for nothing: without faults to come, each run ends. Where
 * it ends, all requests are over but those of the dead and the stopped.
 *
 * Faults: -DFAULT=n replaces one step, marked (n) below.
 */
#ifndef N
#define N 2         /* workers, three at most */
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef REQUESTS
#define REQUESTS 2  /* of each worker */
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef STOPS
#define STOPS 1     /* for good; who goes on later was slow */
#endif
#ifndef DOUBTS
#define DOUBTS 1    /* how often one that runs is taken for one that is stopped */
#endif
#ifndef CUTS
#define CUTS 1      /* connections that end though both workers live */
#endif
#ifndef CANCELS
#define CANCELS 1
#endif
#ifndef FAULT
#define FAULT 0
#endif
#define EPOCHS (2 + KILLS + 2 * STOPS + DOUBTS)

/* The files: bit n is `leader.n`, and whose row that links to. Bit 0: no leader yet. */
short links = 1;
byte leader_of[16];
/* The rows, which all may read. */
bool locked[3];     /* it lives, and the lock says nothing else */
byte slots[3];
byte follows[3];    /* the word EPOCH */

/* A worker. */
mtype = { SEEKS, STANDS, FOLLOWS, ELECTED, READS, SHUT, OPEN };
mtype role[3] = SEEKS;
byte epoch[3];      /* that it follows, leads or stands for */
bool deposes[3];    /* the leader of its epoch, dead or not */
bool stopped[3];
mtype = { NEW, WAITING, HELD, DONE };
mtype request[3] = NEW;
byte number[3];
mtype = { FREE, WRITE, LOOK, UNDO, TELL };
mtype step[3] = FREE; /* under its lock */
byte rows_read[3];

/* What a leader knows of each worker: its ticket, and what its row said. */
#define AT(l, v) ((l) * 3 + (v))
#define QUEUED(n) (2 * (n) - 1)
#define GRANTED(n) (2 * (n))
#define IS_QUEUED(t) ((t) & 1)
#define IS_GRANTED(t) ((t) != 0 && !((t) & 1))
byte ticket[9], lump[9];
bool greeted[9];

/* The connection of each worker to the leader of its epoch; a leader's own calls. */
mtype = { HELLO, ASK, CANCEL, RELEASE, END };
chan up[3] = [8] of { mtype, byte };
chan down[3] = [4] of { byte };
byte greetings[3];  /* on their way: until then, what the leader sends is lost */

byte kills, stops, doubts, cuts, cancels;
bool ended;

#define HAS(n) ((links >> (n)) & 1)
#define LEADS(l) (role[l] == READS || role[l] == SHUT || role[l] == OPEN)
#define SERVES(l, e) (epoch[l] == (e) && (role[l] == ELECTED || LEADS(l)))
#define TAKEN(l, v) (IS_GRANTED(ticket[AT(l, v)]) + lump[AT(l, v)])
#define IN_USE(l) (TAKEN(l, 0) + TAKEN(l, 1) + TAKEN(l, 2))
#define RUNS(v) (locked[v] && !stopped[v])
#define LEADER leader_of[epoch[me]]
#define HOLDS(v) (locked[v] && request[v] == HELD)

/* The law: what live workers use is never more than there is. */
inline check() {
  assert(HOLDS(0) + HOLDS(1) + HOLDS(2) <= SLOTS)
}

inline newest() {
  found = EPOCHS + 1;
  do
  :: HAS(found) -> break
  :: else -> found--
  od
}

inline empty_up() {
  do
  :: len(up[me]) > 0 -> up[me]?_, _
  :: else -> break
  od;
  greetings[me] = 0
}

inline put(kind_, n_) {
  assert(nfull(up[me]));
  up[me]!kind_, n_
}

/* Member._step_down, Leader.stop: and then it seeks. */
inline step_down() {
  if
  :: role[me] == FOLLOWS -> put(END, 0)
  :: else
  fi;
  do
  :: len(down[me]) > 0 -> down[me]?_
  :: else -> break
  od;
  for (i : 0 .. N - 1) {
    ticket[AT(me, i)] = 0; lump[AT(me, i)] = 0;
    greeted[AT(me, i)] = false
  };
  i = 0; rows_read[me] = 0;
  role[me] = SEEKS
}

inline read_row() {
  if
  :: rows_read[me] != me && locked[rows_read[me]] ->
    lump[AT(me, rows_read[me])] = slots[rows_read[me]]
  :: else
  fi;
  rows_read[me]++
}

inline grant(v) {
  ticket[AT(me, v)]++;
  if
  :: v == me || (role[v] == FOLLOWS && epoch[v] == epoch[me] && !greetings[v]) ->
    down[v]!ticket[AT(me, v)] / 2
  :: else
  fi
}

/* Member._tell, and the calls of a leader for itself. */
inline tell(what) {
  if
  :: LEADS(me) -> ticket[AT(me, me)] = (what == ASK -> QUEUED(number[me]) : 0)
  :: role[me] == FOLLOWS -> put(what, number[me])
  :: else
  fi
}

inline over() {
  if
  :: number[me] < REQUESTS -> request[me] = NEW
  :: else -> request[me] = DONE
  fi
}

/* Whether a frame of that worker is there to be read. */
#define HEARS(v) (v != me && (role[me] == SHUT || role[me] == OPEN) && \
  epoch[v] == epoch[me] && nempty(up[v]))
/* Who does not know that it is deposed may grant whatever it likes. */
#define MAY_GRANT(v) (role[me] == OPEN && IS_QUEUED(ticket[AT(me, v)]) && \
  (IN_USE(me) < SLOTS || HAS(epoch[me] + 1)))
#define IS_DEAD(v) (!locked[v] && !greeted[AT(me, v)] && TAKEN(me, v))
/* (8) what a stopped worker was granted and does not take stays with it */
#define HOARDS(v) (FAULT != 8 && v != me && locked[v] && role[me] == OPEN && \
  TAKEN(me, v) > slots[v])
#define IS_STOPPED_HOARDER ((HOARDS(0) && stopped[0]) || (HOARDS(1) && stopped[1]) || \
  (HOARDS(2) && stopped[2]))

/* (6) any request takes any grant */
#define IS_FOR(n) (FAULT == 6 || (n) == number[me])

/* Leader._handle, of one frame of a worker. */
inline handle(v) {
  up[v]?kind, n;
  if
  :: kind == HELLO -> /* Leader._greet: n says what it holds, or who waits there */
#if FAULT == 5      /* (5) what its row said is given back before the charge anew */
    lump[AT(me, v)] = 0; ticket[AT(me, v)] = 0;
    for (i : 0 .. N - 1) {
      if
      :: MAY_GRANT(i) -> grant(i)
      :: else
      fi
    };
    i = 0;
#endif
    ticket[AT(me, v)] = n;
    lump[AT(me, v)] = 0;
    greeted[AT(me, v)] = true; greetings[v]--
  :: kind == ASK -> ticket[AT(me, v)] = QUEUED(n)
  :: kind == CANCEL || kind == RELEASE -> ticket[AT(me, v)] = 0
  :: kind == END -> /* Leader._lose */
    greeted[AT(me, v)] = false;
    if
    :: IS_QUEUED(ticket[AT(me, v)]) || FAULT == 4 -> /* (4) its end is a death */
      ticket[AT(me, v)] = 0
    :: else
    fi
  fi;
  n = 0; kind = 0
}

/* The fence. */
#if FAULT == 1      /* (1) look, then write */
#define IS_VOID false
#define IS_VOID_EARLY HAS(epoch[me] + 1)
#else
#if FAULT == 3      /* (3) a leader that lives trusts itself */
#define IS_VOID (!LEADS(me) && HAS(epoch[me] + 1))
#elif FAULT == 10   /* (10) a follower trusts its leader */
#define IS_VOID (LEADS(me) && HAS(epoch[me] + 1))
#else
#define IS_VOID HAS(epoch[me] + 1)
#endif
#define IS_VOID_EARLY false
#endif

#if FAULT == 13     /* (13) a lease is used until its release is told */
#define OVER_EARLY skip
#define OVER_LATE over()
#else
#define OVER_EARLY over()
#define OVER_LATE skip
#endif

proctype worker(byte me) {
  byte i, n, found; mtype kind;
end:
  do
  /* Requests, from any thread. */
  :: atomic { RUNS(me) && step[me] == FREE && request[me] == NEW -> /* Member.submit */
    number[me]++; request[me] = WAITING; tell(ASK) }
  :: atomic { RUNS(me) && step[me] == FREE && request[me] == WAITING && cancels < CANCELS ->
    cancels++; tell(CANCEL); over() } /* Member.withdraw */
  :: atomic { RUNS(me) && step[me] == FREE && request[me] == HELD -> /* Member.release */
    slots[me]--; OVER_EARLY; step[me] = TELL }
  :: atomic { RUNS(me) && step[me] == TELL -> step[me] = FREE; OVER_LATE; tell(RELEASE) }

  /* A grant comes: Member.decide, Member._accept. */
  :: atomic { RUNS(me) && step[me] == FREE && nempty(down[me]) ->
    down[me]?n;
    if
    :: request[me] == WAITING && IS_FOR(n) ->
      if
      :: IS_VOID_EARLY -> step_down()
      :: else -> step[me] = WRITE
      fi
    :: else
    fi;
    n = 0 }
  :: atomic { RUNS(me) && step[me] == WRITE -> slots[me]++; step[me] = LOOK }
  :: atomic { RUNS(me) && step[me] == LOOK ->
    if
    :: IS_VOID -> step[me] = UNDO
    :: else -> step[me] = FREE; request[me] = HELD; check()
    fi }
  :: atomic { RUNS(me) && step[me] == UNDO -> slots[me]--; step[me] = FREE; step_down() }

  /* An election: Member._seek, Folder.newest_epoch. */
  :: atomic { RUNS(me) && step[me] == FREE && role[me] == SEEKS ->
    newest();
    if
    :: found != epoch[me] -> empty_up()
    :: else
    fi;
    if
    :: found == 0 || !locked[leader_of[found]] || leader_of[found] == me ||
      (deposes[me] && found == epoch[me]) || !SERVES(leader_of[found], found) ->
      epoch[me] = found; role[me] = STANDS
    :: else -> /* Member._follow */
      if
      :: len(up[me]) > 0 -> empty_up() /* the new connection may be read first */
      :: true
      fi;
      epoch[me] = found; follows[me] = found; role[me] = FOLLOWS;
      if
      :: request[me] == HELD -> n = GRANTED(number[me])
      :: request[me] == WAITING && FAULT != 9 -> /* (9) not told who waits */
        n = QUEUED(number[me])
      :: else
      fi;
      put(HELLO, n); greetings[me]++;
      n = 0
    fi;
    deposes[me] = false; found = 0 }
#if FAULT == 2      /* (2) rows are read before the link */
  :: atomic { RUNS(me) && role[me] == STANDS && rows_read[me] < N -> read_row() }
  :: atomic { RUNS(me) && role[me] == STANDS && rows_read[me] == N ->
#else
  :: atomic { RUNS(me) && role[me] == STANDS -> /* Folder.elect */
#endif
    epoch[me]++;
    if
    :: HAS(epoch[me]) && FAULT != 11 -> /* (11) a link that replaces another */
      epoch[me]--; step_down()
    :: else ->
      assert(epoch[me] <= EPOCHS);
      links = links | (1 << epoch[me]);
      leader_of[epoch[me]] = me;
      role[me] = ELECTED
    fi }

  /* A take-over: Member._lead, Leader.charge_here, Leader.take_over. */
  :: atomic { RUNS(me) && step[me] == FREE && role[me] == ELECTED ->
    follows[me] = epoch[me]; role[me] = READS;
    if
    :: request[me] == HELD -> ticket[AT(me, me)] = GRANTED(number[me])
    :: request[me] == WAITING -> ticket[AT(me, me)] = QUEUED(number[me])
    :: else
    fi }
  :: atomic { RUNS(me) && role[me] == READS && rows_read[me] < N -> read_row() }
  :: atomic { RUNS(me) && role[me] == READS && rows_read[me] == N -> /* Folder.forget_epochs */
    role[me] = SHUT; rows_read[me] = 0;
    found = epoch[me] - 1;
    for (i : 0 .. N - 1) {
      if
      :: locked[i] && follows[i] < found && FAULT != 7 -> /* (7) though one sleeps */
        found = follows[i]
      :: else
      fi
    };
    links = ((links >> (found + 1)) << (found + 1)) | 1;
    i = 0; found = 0 }
  :: atomic { RUNS(me) && role[me] == SHUT -> role[me] = OPEN } /* Leader._open_up */

  /* A leader at work. */
  :: atomic { RUNS(me) && HEARS(0) -> handle(0) }
  :: atomic { RUNS(me) && HEARS(1) -> handle(1) }
  :: atomic { RUNS(me) && HEARS(2) -> handle(2) }
  :: atomic { RUNS(me) && MAY_GRANT(0) -> grant(0) } /* Leader._answer */
  :: atomic { RUNS(me) && MAY_GRANT(1) -> grant(1) }
  :: atomic { RUNS(me) && MAY_GRANT(2) -> grant(2) }
  :: atomic { RUNS(me) && (role[me] == SHUT || role[me] == OPEN) &&
      (IS_DEAD(0) || IS_DEAD(1) || IS_DEAD(2)) -> /* Leader._reap */
    for (i : 0 .. N - 1) {
      if
      :: IS_DEAD(i) -> ticket[AT(me, i)] = 0; lump[AT(me, i)] = 0
      :: else
      fi
    };
    i = 0 }

  /* The end of an epoch, for this worker: Member._turn, Member._tick. */
  :: atomic { RUNS(me) && step[me] == FREE && HAS(epoch[me] + 1) &&
      (role[me] == FOLLOWS || role[me] == SHUT || role[me] == OPEN) -> step_down() }
  :: atomic { RUNS(me) && step[me] == FREE && role[me] == FOLLOWS &&
      (!locked[LEADER] || !SERVES(LEADER, epoch[me])) -> step_down() }
  :: atomic { RUNS(me) && step[me] == FREE && role[me] == FOLLOWS &&
      ((stopped[LEADER] && FAULT != 12) || doubts < DOUBTS) -> /* (12) no leader is deposed */
    doubts = (stopped[LEADER] -> doubts : doubts + 1);
    step_down(); deposes[me] = true }
  :: atomic { RUNS(me) && step[me] == FREE && (HOARDS(0) || HOARDS(1) || HOARDS(2)) &&
      (IS_STOPPED_HOARDER || doubts < DOUBTS) -> /* Leader.silent */
    doubts = (IS_STOPPED_HOARDER -> doubts : doubts + 1);
    step_down(); deposes[me] = true }

  /* Faults. */
  :: atomic { locked[me] && kills < KILLS ->
    kills++; step_down();
    locked[me] = false; stopped[me] = false; deposes[me] = false;
    slots[me] = 0; step[me] = FREE; request[me] = DONE }
  :: atomic { RUNS(me) && stops < STOPS -> stops++; stopped[me] = true }
  :: atomic { RUNS(me) && step[me] == FREE && role[me] == FOLLOWS && cuts < CUTS ->
    cuts++; step_down() }
  od
}

#define KEPT(v) (locked[v] && stopped[v] -> slots[v] : 0)
#define ROW(v) (locked[v] -> slots[v] : 0)
#define IS_SERVED(v) (!RUNS(v) || request[v] == DONE || KEPT(0) + KEPT(1) + KEPT(2) >= SLOTS)
#define ADDS_UP(l) (!RUNS(l) || role[l] != OPEN || IN_USE(l) <= ROW(0) + ROW(1) + ROW(2))

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) { locked[i] = true; run worker(i) };
    i = 0;
#ifdef BEGUN        /* the first one leads, and the others have greeted it */
    links = 3; leader_of[1] = 0; role[0] = OPEN;
    for (i : 0 .. N - 1) {
      epoch[i] = 1; follows[i] = 1;
      if
      :: i > 0 -> role[i] = FOLLOWS; greeted[AT(0, i)] = true
      :: else
      fi
    };
    i = 0
#endif
  }
  /* No more faults come; then nothing can happen any more. */
  atomic { kills = KILLS; stops = STOPS; doubts = DOUBTS; cuts = CUTS; cancels = CANCELS };
  timeout ->
  assert(IS_SERVED(0) && IS_SERVED(1) && IS_SERVED(2));
  assert(ADDS_UP(0) && ADDS_UP(1) && ADDS_UP(2));
  ended = true
}

/* Each run ends: no worker does the same for ever. */
ltl ends { <> ended }
