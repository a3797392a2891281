package rpccode

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestEveryKindHasACodeOfItsOwn(t *testing.T) {
	taken := make(map[codes.Code]volume.Kind)
	for kind := volume.Internal; kind <= volume.Canceled; kind++ {
		code, ok := codeOf[kind]
		check.That(t, ok, "%v has no code", kind)
		// An answer that cannot be true is as good as one that cannot be read.
		other, double := taken[code]
		check.That(t, !double || kind == volume.Absurd, "%v and %v are both %v", kind, other, code)
		taken[code] = kind
		err := fmt.Errorf("outer: %w", volume.Errorf(kind, "volume /v: it broke"))
		got := Status(err)
		check.That(t, status.Code(got) == code && strings.Contains(got.Error(), "/v"), "%v became %v", kind, got)
	}
	check.That(t, Status(nil) == nil, "no error became one")
	check.Equal(t, status.Code(Status(errors.New("plain"))), codes.Internal, "an error without a kind")
	ready := status.Error(codes.NotFound, "made elsewhere")
	said := Status(ready)
	check.That(t, status.Code(said) == codes.NotFound, "a finished status became %v", said)
	within := fmt.Errorf("outer: %w", errors.Join(ready, ready))
	for code, err := range map[codes.Code]error{codes.NotFound: within, codes.Aborted: volume.Errorf(volume.Busy, "%w", within)} {
		got := status.Convert(Status(err))
		check.That(t, got.Code() == code && got.Message() == "outer: made elsewhere\nmade elsewhere", "a wrapped status became %v", got)
	}
}

// TestCodesThatKubeletTakesForMaybe keeps the kinds of unfinished work within
// the codes after which kubelet calls Unpublish.
func TestCodesThatKubeletTakesForMaybe(t *testing.T) {
	maybe := []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted}
	for _, kind := range []volume.Kind{volume.Busy, volume.Timeout, volume.Canceled, volume.NoSandbox, volume.Exhausted} {
		check.That(t, slices.Contains(maybe, codeOf[kind]), "%v is final for kubelet", kind)
	}
}
