/* One session id, its sessions one after another, and an engine behind a link.
 *
 * A client starts, cancels and ends the sessions; the engine may die at any moment and
 * is replaced, with a new client, by the next incarnation. The link is ordered in each
 * direction, but may lose a message, and deliver one again later. What is under way to
 * an engine that died may reach the next one.
 *
 * With -DTRACE a simulation prints one line per change: the change, and what can be
 * seen after it. These lines are replayed on the real registry, client and engine.
 *
 * Faults: -DFAULT=n replaces one condition.
 */
#define G 2         /* sessions */
#ifndef DEATHS
#define LOSSES 1
#define DOUBLES 1
#define DEATHS 1
#define TIMEOUTS 1  /* whether a start or an END may be given up */
#endif
#ifndef FAULT
#define FAULT 0
#endif
#define FRAMES 8    /* messages under way in one direction */
#define ROOM(wire) (len(wire) < FRAMES - G)

/* A session: its start is under way, it streams, its END is under way, all is done. */
#define FREE 0
#define STARTING 1
#define STARTED 2
#define ENDING 3
#define QUIET 4
byte phase[G];
bool closed[G];     /* by its owner */
bool failed[G];     /* its END was given up: the engine may still have it */
byte home[G];       /* the incarnation that it was started on */

mtype = { Status, Start, Cancel, End, Leave, Ready, Report, Tick, Fault };
mtype = { Open, Close, Cut, Stop, GiveUp, Hear, Take, Finish, LoseUp, LoseDown,
          DoubleUp, DoubleDown, Die, Connect };

/* To the engine: incarnation, sequence, kind, session. */
chan up = [FRAMES] of { byte, byte, mtype, byte };
/* And back: sequence, kind; accepted, finished and done sessions as sets. */
chan down = [FRAMES] of { byte, mtype, byte, byte, byte };

byte incarnation = 1;
/* The client's end. */
bool ready, lost;
byte sent_up, heard_down;
bool known[G], settled[G], finish_seen[G], end_sent[G], cancel_sent[G];
/* The engine's end. */
bool alive = true, met;
byte sent_down, heard_up;
bool live[G], finished[G];
/* History: how often the engine did what it may do once. */
byte begun[G], ended[G];

#define TWICE (met && seq < heard_up)
#define FOREIGN (inc != incarnation)
#define ENDS(g) g
#define END_LATE(g) end_session(g)
#if FAULT == 1      /* A message that comes twice is handled twice. */
#undef TWICE
#define TWICE false
#elif FAULT == 2    /* END names the id, not the generation. */
#undef ENDS
#define ENDS(g) (live[1] -> 1 : 0)
#elif FAULT == 3    /* A session that was closed while it started is not ended. */
#undef END_LATE
#define END_LATE(g) phase[g] = QUIET
#elif FAULT == 4    /* An engine handles what was for the one before it. */
#undef FOREIGN
#define FOREIGN false
#endif

#define HAS(set, g) ((set >> g) & 1)

#ifdef TRACE
#define SHOWN(g) ((phase[g] == STARTING || phase[g] == ENDING) && closed[g] -> 3 : phase[g])
#define SHOW(what, g) printf("@ %e %d : %d %d %d %d %d %d %d %d %d\n", what, g, \
  SHOWN(0), SHOWN(1), live[0] + 2 * live[1], failed[0] + 2 * failed[1], \
  ready && !lost, lost, len(up), len(down), incarnation)
#else
#define SHOW(what, g) skip
#endif

inline send_up(kind, g) { up!incarnation, sent_up, kind, g; sent_up++ }
inline send_down(kind, a, f, d) { down!sent_down, kind, a, f, d; sent_down++ }

inline end_session(g) {
  phase[g] = ENDING;
  /* END is sent once, and never before START. */
  assert(!end_sent[g] && known[g]);
  end_sent[g] = true;
  send_up(End, g)
}

inline lose_engine() {
  lost = true;
  for (i : 0 .. G - 1) {
    known[i] = false;
    if
    :: phase[i] == STARTING || phase[i] == ENDING -> closed[i] = true; phase[i] = QUIET
    :: else
    fi
  };
  i = 0
}

inline hear() {
  down?seq, kind, accepted, over, done;
  if
  :: seq != heard_down || kind == Fault -> /* nothing after it could be trusted */
    lose_engine();
    send_up(Leave, 0)
  :: else ->
    heard_down++;
    assert((kind == Ready) != ready);
    if
    :: kind == Ready -> ready = true
    :: kind == Tick ->
      for (i : 0 .. G - 1) {
        if
        :: HAS(accepted, i) ->
          assert(known[i] && !settled[i]);
          settled[i] = true;
          if
          :: phase[i] == STARTING && closed[i] -> END_LATE(i)
          :: phase[i] == STARTING && !closed[i] -> phase[i] = STARTED
          :: else
          fi
        :: else
        fi;
        assert(!HAS(over, i) || (known[i] && !finish_seen[i]));
        finish_seen[i] = finish_seen[i] || HAS(over, i);
        if
        :: HAS(done, i) ->
          assert(known[i] && end_sent[i]);
          known[i] = false;
          phase[i] = QUIET
        :: else
        fi
      }
    :: else
    fi
  fi;
  seq = 0; accepted = 0; over = 0; done = 0; i = 0
}

proctype owner(byte me) {
end:
  do
  :: atomic { phase[me] == FREE && ready && !lost && ROOM(up) &&
      (me == 0 || closed[me - (me > 0)]) -> /* the id is free */
    phase[me] = STARTING; home[me] = incarnation; known[me] = true;
    send_up(Start, me);
    SHOW(Open, me) }
  :: atomic { phase[me] == STARTING && !closed[me] -> closed[me] = true; SHOW(Close, me) }
  :: atomic { phase[me] == STARTING && closed[me] && TIMEOUTS && ROOM(up) ->
    end_session(me); SHOW(Cut, me) }
  :: atomic { phase[me] == STARTED && known[me] && ROOM(up) && !cancel_sent[me] &&
      !finish_seen[me] ->
    cancel_sent[me] = true; send_up(Cancel, me); SHOW(Stop, me) }
  :: atomic { phase[me] == STARTED && ROOM(up) ->
    closed[me] = true;
    if :: known[me] -> end_session(me) :: else -> phase[me] = QUIET fi;
    SHOW(Close, me) }
  :: atomic { phase[me] == ENDING && TIMEOUTS ->
    phase[me] = QUIET; failed[me] = true; SHOW(GiveUp, me) }
  od
}

proctype client() {
  byte i, seq, accepted, over, done;
  mtype kind;
end:
  do
  :: atomic { nempty(down) && !lost && ROOM(up) -> hear(); SHOW(Hear, 0) }
  od
}

/* The engine ends all sessions of a client, and knows it no more. */
inline forget() {
  for (i : 0 .. G - 1) {
    if :: live[i] -> live[i] = false; ended[i]++ :: else fi;
    finished[i] = false
  };
  i = 0; met = false; heard_up = 0; sent_down = 0
}

inline handle() {
  if
  :: kind == Leave -> forget()
  :: kind == Status -> send_down(Report, 0, 0, 0)
  :: kind == Start ->
    /* Each session is begun once, by the engine it was started on, before its END. */
    begun[g]++;
    assert(begun[g] == 1 && home[g] == incarnation && !ended[g]);
    live[g] = true; accepted = 1 << g
  :: kind == Cancel -> assert(cancel_sent[g])
  :: kind == End ->
    done = 1 << g;
    g = ENDS(g);
    if :: live[g] -> live[g] = false; ended[g]++ :: else fi;
    /* What ends is what was to be ended. */
    assert(ended[g] <= 1 && (!ended[g] || end_sent[g]))
  fi;
  if :: accepted + over + done -> send_down(Tick, accepted, over, done) :: else fi
}

inline take() {
  up?inc, seq, kind, g;
  accepted = 0; over = 0; done = 0;
  if
  :: FOREIGN || TWICE
  :: !(FOREIGN || TWICE) && seq > heard_up -> /* one was lost, about any of the sessions */
    send_down(Fault, 0, 0, 0);
    forget()
  :: else ->
    if :: !met -> met = true; send_down(Ready, 0, 0, 0) :: else fi;
    heard_up = seq + 1;
    handle()
  fi;
  inc = 0; seq = 0; g = 0; accepted = 0; over = 0; done = 0
}

proctype engine() {
  byte g, i, seq, inc, accepted, over, done;
  mtype kind;
end:
  do
  :: atomic { alive && nempty(up) && ROOM(down) -> take(); SHOW(Take, 0) }
  :: atomic { alive && live[0] && !finished[0] && ROOM(down) ->
    finished[0] = true; send_down(Tick, 0, 1, 0); SHOW(Finish, 0) }
  :: atomic { alive && live[1] && !finished[1] && ROOM(down) ->
    finished[1] = true; send_down(Tick, 0, 2, 0); SHOW(Finish, 1) }
  od
}

proctype link() {
  byte losses, doubles, a, b, c, d;
  mtype kind;
end:
  do
  :: atomic { losses < LOSSES && nempty(up) ->
    losses++; up?a, b, kind, c; SHOW(LoseUp, 0); a = 0; b = 0; c = 0 }
  :: atomic { losses < LOSSES && nempty(down) ->
    losses++; down?a, kind, b, c, d; SHOW(LoseDown, 0); a = 0; b = 0; c = 0; d = 0 }
  :: atomic { doubles < DOUBLES && nempty(up) && ROOM(up) ->
    doubles++; up?<a, b, kind, c>; up!a, b, kind, c; SHOW(DoubleUp, 0);
    a = 0; b = 0; c = 0 }
  :: atomic { doubles < DOUBLES && nempty(down) && ROOM(down) ->
    doubles++; down?<a, kind, b, c, d>; down!a, kind, b, c, d; SHOW(DoubleDown, 0);
    a = 0; b = 0; c = 0; d = 0 }
  od
}

inline die() {
  alive = false;
  for (i : 0 .. G - 1) { live[i] = false; finished[i] = false };
  i = 0;
  if :: !lost -> lose_engine() :: else fi;
  do
  :: nempty(down) -> down?a, kind, b, c, d
  :: empty(down) -> break
  od;
  a = 0; b = 0; c = 0; d = 0;
  SHOW(Die, 0)
}

/* Starts and replaces the engine, and the client with it. */
proctype supervisor() {
  byte deaths, i, a, b, c, d;
  mtype kind;
end:
  do
  :: atomic { alive && deaths < DEATHS -> deaths++; die() }
  :: atomic { alive && (lost || (!ready && empty(up) && empty(down))) -> die() }
  :: atomic { !alive && ROOM(up) ->
    incarnation++;
    alive = true; met = false; sent_down = 0; heard_up = 0;
    ready = false; lost = false; sent_up = 0; heard_down = 0;
    send_up(Status, 0);
    SHOW(Connect, 0) }
  od
}

/* No session that is over, as far as its client knows, is live in the engine. */
#define LEAKS(g) (phase[g] == QUIET && !failed[g] && !lost && live[g])

init {
  atomic {
    send_up(Status, 0);
    run owner(0); run owner(1); run client(); run engine(); run link(); run supervisor()
  }
end:
  atomic { LEAKS(0) || LEAKS(1) -> assert(false) }
}

/* A session that its owner has closed becomes quiet. */
ltl quiet { [] (closed[0] -> <> (phase[0] == QUIET)) }
ltl all_quiet { [] (closed[1] -> <> (phase[1] == QUIET)) }
