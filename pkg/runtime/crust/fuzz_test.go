package crust

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// FuzzStats takes both forms of an answer: what comes through is sane.
func FuzzStats(f *testing.F) {
	for _, seed := range []string{
		`{"usage":[{"available":7,"total":10,"used":3,"unit":"BYTES"}],"volume_condition":{"abnormal":true,"message":"x","reason":"Read Only"}}`,
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
	word := regexp.MustCompile(`^[A-Za-z]{0,64}$`)
	if c := report.Condition; c != nil && (!sys.IsText(c.Message) || len(c.Message) > 1<<10 || !word.MatchString(c.Reason)) {
		t.Fatalf("taken: %+v", c)
	}
}

// TestReasonOfACondition: it ends in the status of a pod, which the Kubernetes API checks.
func TestReasonOfACondition(t *testing.T) {
	for said, want := range map[string]string{
		"ReadOnly": "ReadOnly", "read only": "", "Ärger": "", "A1": "", strings.Repeat("x", 64): strings.Repeat("x", 64), strings.Repeat("x", 65): "",
	} {
		byProgram := &handlerv1.GetVolumeStatsResponse{}
		raw := fmt.Sprintf(`{"volume_condition":{"abnormal":true,"message":"m","reason":%q}}`, said)
		check.Must(t, protojson.Unmarshal([]byte(raw), byProgram))
		report, err := readReport(byProgram)
		if err != nil || report.Condition.Reason != want {
			t.Errorf("%q: %+v, %v", said, report.Condition, err)
		}
	}
}
