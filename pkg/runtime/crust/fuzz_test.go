package crust

import (
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
)

// FuzzStats takes both forms of an answer: what comes through is sane.
func FuzzStats(f *testing.F) {
	for _, seed := range []string{
		`{"usage":[{"available":7,"total":10,"used":3,"unit":"BYTES"}],"volume_condition":{"abnormal":true,"message":"x"}}`,
		`{"usage":[{"available":"7","total":"10","unit":2}],"volumeCondition":{}}`, `{"usage":[null]}`, `{}`,
		`{"usage":[{"total":-1,"unit":"BYTES"}]}`, "\x0a\x04\x10\x01\x20\x01",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var byProgram, bySocket handlerv1.GetVolumeStatsResponse
		if (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, &byProgram) == nil {
			sane(t, &byProgram)
		}
		if proto.Unmarshal(raw, &bySocket) == nil {
			sane(t, &bySocket)
		}
	})
}

func sane(t *testing.T, said *handlerv1.GetVolumeStatsResponse) {
	report, err := readReport(said)
	if err != nil {
		return
	}
	if len(report.Usage) > 2 || (len(report.Usage) == 0 && report.Condition == nil) {
		t.Fatalf("taken: %+v", report)
	}
	for _, u := range report.Usage {
		if u.Unit == volume.UnitUnknown || u.Total <= 0 || u.Used < 0 || u.Available < 0 || u.Used > u.Total || u.Available > u.Total {
			t.Fatalf("taken: %+v", u)
		}
	}
	if c := report.Condition; c != nil && (!sys.IsText(c.Message) || len(c.Message) > 1<<10) {
		t.Fatalf("taken: %q", c.Message)
	}
}
