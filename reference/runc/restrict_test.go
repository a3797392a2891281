package runc

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestOptionsOfAMountAlone(t *testing.T) {
	const spec = `{"mounts":[{"source":"/a"},{"source":"/b<c","options":["rbind","ro"],"later":{"n":1}}],"later":12345678901234567890}`
	got, err := withOptions([]byte(spec), map[int][]string{1: {"rbind", "ro", "nosuid"}})
	check.Must(t, err)
	const want = `{"mounts":[{"source":"/a"},{"source":"/b<c","options":["rbind","ro","nosuid"],"later":{"n":1}}],"later":12345678901234567890}`
	var is, wanted any
	check.Must(t, json.Unmarshal(got, &is))
	check.Must(t, json.Unmarshal([]byte(want), &wanted))
	if !reflect.DeepEqual(is, wanted) {
		t.Errorf("%s", got)
	}
	for _, other := range []string{`{}`, `{"mounts":[]}`, `{"mounts":`} {
		if _, err := withOptions([]byte(other), map[int][]string{1: nil}); err == nil {
			t.Errorf("%s is taken", other)
		}
	}
}
