package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
)

// T is what helpers need of a test. A testing.TB is one; a program has a Stage.
type T interface {
	Helper()
	Context() context.Context
	Cleanup(end func())
	TempDir() string
	Failed() bool
	Log(args ...any)
	Logf(format string, args ...any)
	Error(args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Skip(args ...any)
}

// Stage is the T of a program that is no test.
type Stage struct {
	ctx      context.Context
	mu       sync.Mutex
	cleanups []func()
	problems []error // that nobody was told yet
	failed   bool
}

// NewStage makes one. End must be called.
func NewStage(ctx context.Context) *Stage { return &Stage{ctx: ctx} }

// Do does everything that is done on a stage, and ends it.
func Do(ctx context.Context, f func(T)) error {
	s := NewStage(ctx)
	return errors.Join(s.Do(f), s.End())
}

// Do calls f, which Fatal ends early. The error says all that went wrong in it.
func (s *Stage) Do(f func(T)) error {
	ended := make(chan struct{})
	go func() { defer close(ended); f(s) }()
	<-ended
	return s.taken()
}

// End cleans up, the last first, and says what went wrong in that.
func (s *Stage) End() error {
	for len(s.cleanups) > 0 {
		last := len(s.cleanups) - 1
		end := s.cleanups[last]
		s.cleanups = slices.Delete(s.cleanups, last, last+1)
		ended := make(chan struct{})
		go func() { defer close(ended); end() }()
		<-ended
	}
	return s.taken()
}

func (s *Stage) taken() error {
	err := errors.Join(s.problems...)
	s.problems = nil
	return err
}

// Helper is for tests.
func (*Stage) Helper() {}

// Context is that of the program.
func (s *Stage) Context() context.Context { return s.ctx }

// Cleanup has something done at the end.
func (s *Stage) Cleanup(end func()) { s.cleanups = append(s.cleanups, end) }

// TempDir makes a directory that goes at the end.
func (s *Stage) TempDir() string {
	dir, err := os.MkdirTemp("", Prefix("stage"))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Failed tells whether anything went wrong so far.
func (s *Stage) Failed() bool { return s.failed }

// Log writes to the standard error.
func (*Stage) Log(args ...any) { fmt.Fprintln(os.Stderr, args...) }

// Logf writes to the standard error.
func (*Stage) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Error remembers what went wrong.
func (s *Stage) Error(args ...any) { s.remember(errors.New(fmt.Sprint(args...))) }

// Errorf remembers what went wrong.
func (s *Stage) Errorf(format string, args ...any) { s.remember(fmt.Errorf(format, args...)) }

// Fatal remembers what went wrong and ends the goroutine.
func (s *Stage) Fatal(args ...any) { s.Error(args...); runtime.Goexit() }

// Fatalf remembers what went wrong and ends the goroutine.
func (s *Stage) Fatalf(format string, args ...any) { s.Errorf(format, args...); runtime.Goexit() }

// Skip ends the goroutine, too: a program has nothing to skip.
func (s *Stage) Skip(args ...any) { s.Fatal(args...) }

func (s *Stage) remember(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = true
	s.problems = append(s.problems, err)
}
